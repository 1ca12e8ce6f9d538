"""Plans: how long they take, how close they are to the bound, and what other policies would do."""
