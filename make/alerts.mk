.PHONY: alerts-check
alerts-check: ## alert rules and their cases, by Prometheus' own promtool
	@make/promtool.sh check config --syntax-only deploy/prometheus/prometheus.yml
	@make/promtool.sh check rules deploy/prometheus/alerts.yml
	@make/promtool.sh test rules deploy/prometheus/alerts_test.yml
