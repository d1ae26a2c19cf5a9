"""The commands of a caller, which speak to the API alone; each file adds its own."""
