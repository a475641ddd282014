"""`commlayer headroom`: the most that faster communication could win for a job."""
