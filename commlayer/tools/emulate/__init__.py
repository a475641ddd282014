"""Networks under stress on one Linux machine: the code behind `commlayer emulate`."""
