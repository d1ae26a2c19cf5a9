"""The promise to workers: heartbeats, reports, who is alive and how busy."""
