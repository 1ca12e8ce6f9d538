"""Attention: the verb (`api`), its op (`op`), one call (`signature`, `call`), its order (`schedule`)."""
