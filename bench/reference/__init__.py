"""What Oncue is compared with."""
