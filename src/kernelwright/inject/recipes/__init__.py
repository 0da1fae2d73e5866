"""One file per model family; `_recipe.recipes()` finds them."""
