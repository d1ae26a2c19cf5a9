"""One file per legal move of a job; each is one guarded statement or a few in one transaction."""
