"""Update the tables of the documents from the results in the source tree: ``python -m ascend_grad.bench``."""

from .documents import update_documents

if __name__ == "__main__":
    update_documents()
