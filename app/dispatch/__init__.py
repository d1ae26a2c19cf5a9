"""The lock holder's work: choose, claim, send, recover."""
