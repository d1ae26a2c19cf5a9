"""Measurements; nothing imports them, and they print what they measured."""
