# What the router is made of: everything that its image installs, each file by its hash.
LOCK      := requirements.lock
INSTALLED  = $$(sed -n 's/==.*//p' $(LOCK))
# Licences that may be shipped with a product, as packages spell them. Add one only after reading it.
LICENCES  := MIT;MIT License;MIT OR Apache-2.0;Apache-2.0;Apache Software License;Apache-2.0 AND MIT;$\
             Apache-2.0 AND BSD-2-Clause;CC0-1.0 OR Apache-2.0;BSD-2-Clause;BSD-3-Clause;3-Clause BSD License;ISC;$\
             PSF-2.0;MIT AND PSF-2.0;Python Software Foundation License

.PHONY: supply-tools
supply-tools: $(READY)
	@$(RUN)/python -c 'import piptools, pip_audit, piplicenses' 2>/dev/null || \
	  $(RUN)/pip install --quiet --disable-pip-version-check '.[supply]'

.PHONY: lock
lock: supply-tools ## requirements.lock: the newest versions that pyproject.toml allows, with hashes
	$(RUN)/python -m piptools compile --quiet --upgrade --generate-hashes --strip-extras --allow-unsafe --no-header \
	  --no-annotate --no-emit-index-url --no-emit-find-links --no-emit-trusted-host -o $(LOCK) pyproject.toml

# Strict, since what could not be asked about has not been audited.
.PHONY: audit
audit: supply-tools ## known vulnerabilities of what is locked (asks a service; fails where it has no answer)
	@$(RUN)/python -m pip_audit --strict --disable-pip --require-hashes -r $(LOCK) || \
	  { echo "audit: FAILED: see above for what was found, or could not be asked about" >&2; exit 1; }

.PHONY: licences
licences: supply-tools ## licences of what is locked, against those allowed
	$(RUN)/python -m piplicenses --python $(RUN)/python --order license --packages $(INSTALLED) --allow-only="$(LICENCES)"
