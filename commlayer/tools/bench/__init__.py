"""Measuring collectives side by side: the code behind `commlayer bench`."""
