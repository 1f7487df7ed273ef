# The trainer, over the base image (context `base`). Also makes the demo's model and answers `penstock audit`.
FROM base

COPY --chown=root:root . /opt/penstock
USER root
RUN pip install --no-cache-dir --no-deps --no-build-isolation --editable /opt/penstock
USER penstock

EXPOSE 9400
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s --retries=3 \
    CMD ["python3", "/opt/penstock/deploy/images/healthy.py"]
ENTRYPOINT ["/opt/penstock/deploy/images/trainer.sh"]
