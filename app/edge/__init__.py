"""What every route shares: problem details, request ids, body limits."""
