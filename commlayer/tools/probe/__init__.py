"""`commlayer probe`: measures the network between the hosts of a job, and says what is wrong with it."""
