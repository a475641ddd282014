"""`commlayer tune`: settings that make a user's unchanged job faster, from a model and a few live trials."""
