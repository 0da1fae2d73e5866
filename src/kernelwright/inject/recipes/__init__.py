"""One file a model family; `recipe.recipes()` finds them by themselves."""
