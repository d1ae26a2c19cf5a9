"""Tools of the developers; nothing of the product imports them."""
