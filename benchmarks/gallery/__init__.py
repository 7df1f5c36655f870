"""The gallery's variants, and the page that shows them."""
