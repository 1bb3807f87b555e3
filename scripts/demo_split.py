"""demo_split.py OUT_DIR GENRE=FOLDER...: makes OUT_DIR/train/GENRE.jsonl and OUT_DIR/eval/GENRE.jsonl, one document a
record, from the text files below each folder (*.txt, *.md, WordNet's data.*, Python's topics.py).

One surprising decision: the held-out part is chosen by counting bytes, not by chance. Documents are cut at blank lines
into pieces of at most 16 KB, and a piece is held out whenever less than 2 % of its genre's text before it was. So the
split is the same on every machine, every genre is in both parts, and a piece's own size has no say. What is left of a
document between two held-out pieces stays one record."""
import ast
import json
import re
import sys
from pathlib import Path

EVAL_SHARE = 0.02
MOST_BYTES = 16 * 1024
LEAST_BYTES = 64 * 1024  # of a genre: less than this is no text to train on
GLOSS = re.compile(r"^\d{8} \d\d [nvasr] .* \| (.*?)\s*$")


def read_documents(folder):
    """Yields the texts of a folder's files in the order of their paths. Bytes that are no UTF-8 become U+FFFD."""
    for path in sorted(p for p in folder.rglob("*") if p.is_file() and not p.is_symlink()):
        if path.suffix in (".txt", ".md"):
            yield path.read_text(errors="replace")
        elif path.name.startswith("data.") and path.parent.name == "wordnet":
            glosses = (GLOSS.match(line) for line in path.read_text(errors="replace").splitlines())
            yield "\n".join(m[1][:1].upper() + m[1][1:] + "." + "\n" * (i % 20 == 19) for i, m in enumerate(filter(None, glosses)))
        elif path.name == "topics.py":
            yield from ast.literal_eval(path.read_text().split("topics = ", 1)[1]).values()


def pieces(text, most):
    """Cuts at blank lines into pieces of at most `most` bytes; a longer paragraph stays whole."""
    piece, size = [], 0
    for paragraph in re.split(r"\n\s*\n", text):
        length = len(paragraph.encode()) + 2
        if piece and size + length > most:
            yield "\n\n".join(piece) + "\n"
            piece, size = [], 0
        piece.append(paragraph)
        size += length
    if any(p.strip() for p in piece):
        yield "\n\n".join(piece) + "\n"


def split(documents):
    """(train, eval): lists of records."""
    total = sum(len(d.encode()) for d in documents)
    most = min(MOST_BYTES, max(1024, int(total * EVAL_SHARE / 2)))
    train, held_out, seen, held = [], [], 0, 0
    for document in documents:
        stretch = []
        for piece in pieces(document, most):
            size = len(piece.encode())
            if held < EVAL_SHARE * seen:
                held_out.append(piece)
                held += size
                train += ["\n".join(stretch)] if stretch else []
                stretch = []
            else:
                stretch.append(piece)
            seen += size
        train += ["\n".join(stretch)] if stretch else []
    return train, held_out


def write(path, texts):
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", encoding="utf-8") as file:
        for text in texts:
            file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
    return sum(len(t.encode()) for t in texts)


def main(out, genres):
    for genre in genres:
        name, folder = genre.split("=", 1)
        documents = list(read_documents(Path(folder)))
        size = sum(len(d.encode()) for d in documents)
        if size < LEAST_BYTES:
            sys.exit(f"fedshard: error: {folder} holds {size} bytes in *.txt and *.md files; the demo needs {LEAST_BYTES} or more")
        train, held_out = split(documents)
        train_bytes = write(out / "train" / f"{name}.jsonl", train)
        eval_bytes = write(out / "eval" / f"{name}.jsonl", held_out)
        print(f"fedshard: demo text: {name}: {len(documents)} files, {train_bytes / 1e6:.1f} MB to train on, "
              f"{eval_bytes / 1e6:.2f} MB held out in {len(held_out)} pieces")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
