"""The promise to admins: keys, tenants, and who changed what."""
