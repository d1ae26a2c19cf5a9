"""Everything that reads or writes the job tables: states, moves and reads."""
