"""Trials of a user's unchanged job: a few optimizer steps with other settings, then the job ends."""
