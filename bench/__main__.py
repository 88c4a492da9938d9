"""``python -m ascend_grad.bench`` writes the tables of the documents anew, from the results kept with the sources."""

from .documents import update_documents

if __name__ == "__main__":
    update_documents()
