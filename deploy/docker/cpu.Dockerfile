# Hadron on the CPU. Build from the repository's root.
FROM rust:1.95-bookworm AS build
WORKDIR /src
COPY . .
RUN cargo build --profile dist --locked --bin hadron

FROM debian:bookworm-slim
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates libstdc++6 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 10001 hadron
COPY --from=build /src/target/dist/hadron /usr/local/bin/hadron
USER 10001
EXPOSE 8000
STOPSIGNAL SIGTERM
ENTRYPOINT ["hadron"]
CMD ["serve", "--host", "0.0.0.0", "--device", "cpu"]
