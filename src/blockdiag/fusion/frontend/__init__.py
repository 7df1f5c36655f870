"""Front end: jaxprs as flat programs, and programs nested in them."""
