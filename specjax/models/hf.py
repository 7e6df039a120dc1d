"""Hugging Face directories in and out. A family is a config mapping and a table of tensor names; here: Llama.

The names on the right are Hugging Face's; `kernel` matrices are transposed on the way (theirs are ``[out, in]``).
"""
