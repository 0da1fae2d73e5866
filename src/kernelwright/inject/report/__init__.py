"""What an injection did: the record, and the table it prints as."""
