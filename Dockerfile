# The demo as an ordinary user, with the 64 MiB of /dev/shm that a container has by default:
#   docker build -t echelon . && docker run --rm echelon
FROM python:3.11-slim

RUN useradd --create-home trainer
WORKDIR /home/trainer

COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src src
RUN pip install --no-cache-dir -c constraints.txt .

COPY examples examples
RUN chown trainer /home/trainer
USER trainer
CMD ["echelon", "run", "--ranks", "2", "examples/train_gpt.py", "--verify"]
