"""A small language model as a torch module, trained with this library's loss and with torch's."""
