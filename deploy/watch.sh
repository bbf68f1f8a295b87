#!/bin/sh
# Install and start Prometheus and Grafana on Ray's head (Ubuntu or Debian, sudo), both on loopback:
#   sh watch.sh URL        URL: address at which this machine reaches a router
# Then, on your own machine: ray attach FILE.yaml --port-forward 3000 --port-forward 9090
set -eu
url=$1
watch=$HOME/watch

missing=
command -v prometheus >/dev/null || missing="prometheus"
[ -x /usr/share/grafana/bin/grafana ] || missing="$missing grafana"
if [ -n "$missing" ]; then
  for unit in $(echo "$missing" | sed s/grafana/grafana-server/); do
    # Mask the package's own unit, which would start Prometheus on all interfaces.
    sudo ln -sf /dev/null "/etc/systemd/system/$unit.service"
  done
  key=/usr/share/keyrings/grafana.asc
  sudo curl -fsSL --retry 3 https://apt.grafana.com/gpg.key -o $key
  echo "deb [signed-by=$key] https://apt.grafana.com stable main" |
    sudo tee /etc/apt/sources.list.d/grafana.list >/dev/null
  apt() { sudo env DEBIAN_FRONTEND=noninteractive apt-get -q -o DPkg::Lock::Timeout=600 "$@"; }
  apt update
  # shellcheck disable=SC2086  # may be two words
  apt install -y --no-install-recommends $missing
fi

"$HOME/baton/run" baton monitoring "$watch" --url "$url"

start() { # NAME COMMAND...: replaces a running unit; systemd restarts it when it ends
  name=$1
  shift
  sudo systemctl stop "baton-$name" 2>/dev/null || true
  sudo systemctl reset-failed "baton-$name" 2>/dev/null || true
  sudo systemd-run --quiet --unit="baton-$name" --uid="$(id -u)" --gid="$(id -g)" \
    --property=Restart=always --property=RestartSec=5 "$@"
}
start prometheus prometheus --config.file="$watch/prometheus.yml" \
  --storage.tsdb.path="$watch/data" --web.listen-address=127.0.0.1:9090
start grafana /usr/share/grafana/bin/grafana server --homepath=/usr/share/grafana \
  --config="$watch/grafana/grafana.ini"
