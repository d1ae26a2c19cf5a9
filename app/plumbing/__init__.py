"""Connections to the outside: database, Redis, HTTP, clocks. No word of the domain."""
