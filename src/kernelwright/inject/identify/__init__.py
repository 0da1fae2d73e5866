"""What to change: models, the user's selection of modules, kinds of norm, known source code."""
