"""Attention: the verb (`api`), its op (`op`), one call (`signature`, `call`), and the order of its work
(`schedule`)."""
