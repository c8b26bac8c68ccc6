# The chunk server, and the whole command: a worker runs it privileged with /dev/fuse and /var/lib/pvisor from the host,
# with /dev/kvm for fast VMs. A kernel for those is PVISOR_KERNEL, or comes at the first boot after `apt-get update`.
FROM debian:12-slim AS build
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 python3-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY requirements.lock requirements-build.lock pyproject.toml README.md ./
RUN python3 -m venv /opt/pvisor \
    && /opt/pvisor/bin/pip install --no-cache-dir --require-hashes -r requirements.lock \
    && python3 -m venv /build \
    && /build/bin/pip install --no-cache-dir --require-hashes -r requirements-build.lock
COPY imaged imaged
COPY fuse fuse
COPY stage stage
COPY vmm vmm
COPY replay replay
COPY cli cli
RUN /build/bin/pip wheel --no-deps --no-build-isolation --wheel-dir /wheels . \
    && /opt/pvisor/bin/pip install --no-cache-dir --no-deps --no-index /wheels/*.whl

FROM debian:12-slim
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 fuse3 libfuse3-3 mount diffutils ca-certificates \
        qemu-system-x86 qemu-utils busybox-static perl-base e2fsprogs \
    && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/pvisor /opt/pvisor
ENV PATH=/opt/pvisor/bin:$PATH PVISOR_HOME=/var/lib/pvisor
VOLUME /var/lib/pvisor
EXPOSE 7878
STOPSIGNAL SIGTERM
ENTRYPOINT ["pvisor"]
CMD ["serve", "--listen", "0.0.0.0:7878"]
