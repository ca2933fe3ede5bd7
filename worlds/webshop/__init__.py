"""WebShop: the embedded shop, and a client of an official server."""
