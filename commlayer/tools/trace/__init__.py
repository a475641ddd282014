"""One trace of all ranks, with aligned clocks: the code behind `commlayer trace`."""
