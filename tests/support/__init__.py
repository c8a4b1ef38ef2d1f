"""What the tests share: a served repository, requests to it, and a look at what is left behind."""
