# `install.sh REQUIREMENT...`: into /opt/paceline, at the versions in constraints.txt, without the packages' own tests.
set -eu
pip --python /opt/paceline/bin/python install -c constraints.txt "$@"
find /opt/paceline -type d -name tests -prune -exec rm -rf {} +
