"""What there is to change: models, modules a person chose, kinds of norm, known source code."""
