"""seqpar beside what a user would take instead: thirty lines by hand, or another library."""
