#!/bin/sh
# Prometheus and Grafana on Ray's head (Ubuntu or Debian, sudo), both on loopback:
#   sh watch.sh URL        URL: a router, as this machine reaches it
# Then, from your own machine: ray attach FILE.yaml --port-forward 3000 --port-forward 9090
set -eu
url=$1
src=$(dirname "$(dirname "$(readlink -f "$0")")")
watch=$HOME/watch

# Debian's units would start both as they are installed, Prometheus for everybody to ask.
for unit in prometheus grafana-server; do
  sudo ln -sf /dev/null "/etc/systemd/system/$unit.service"
done
install() { sudo env DEBIAN_FRONTEND=noninteractive apt-get -q -o DPkg::Lock::Timeout=600 "$@"; }
if [ ! -x /usr/share/grafana/bin/grafana ] || ! command -v prometheus >/dev/null; then
  key=/usr/share/keyrings/grafana.asc
  sudo curl -fsSL --retry 3 https://apt.grafana.com/gpg.key -o $key
  echo "deb [signed-by=$key] https://apt.grafana.com stable main" |
    sudo tee /etc/apt/sources.list.d/grafana.list >/dev/null
  install update
  install install -y --no-install-recommends prometheus grafana
fi

"$HOME/baton/run" baton monitoring "$watch" --url "$url"
mkdir -p "$watch/grafana-data"

start() { # NAME COMMAND...: in the place of the one that runs, and again if it ends
  name=$1
  shift
  sudo systemctl stop "baton-$name" 2>/dev/null || true
  sudo systemctl reset-failed "baton-$name" 2>/dev/null || true
  sudo systemd-run --quiet --unit="baton-$name" --uid="$(id -u)" --gid="$(id -g)" \
    --property=Restart=always --property=RestartSec=5 "$@"
}
start prometheus prometheus --config.file="$watch/prometheus.yml" \
  --storage.tsdb.path="$watch/data" --web.listen-address=127.0.0.1:9090
start grafana --setenv=GF_SERVER_HTTP_ADDR=127.0.0.1 \
  --setenv=GF_PATHS_DATA="$watch/grafana-data" \
  --setenv=GF_PATHS_PROVISIONING="$src/deploy/grafana/provisioning" \
  --setenv=BATON_DASHBOARDS="$src/deploy/grafana" \
  --setenv=BATON_PROMETHEUS_URL=http://127.0.0.1:9090 \
  --setenv=GF_ANALYTICS_REPORTING_ENABLED=false --setenv=GF_ANALYTICS_CHECK_FOR_UPDATES=false \
  --setenv=GF_AUTH_ANONYMOUS_ENABLED=true \
  /usr/share/grafana/bin/grafana server --homepath=/usr/share/grafana
