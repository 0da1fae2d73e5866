#!/bin/sh
# usage: tests/get_chromium.sh .venv
# Puts a chromium for the tests of the report at .venv/bin/chromium, without root: Debian's packages
# of the headless one, and of the libraries that this machine lacks, unpacked under .venv/chromium.
# Does nothing where a chromium is installed, and never fails: without it those tests skip.
set -eu
venv=$(cd "$1" && pwd)
folder=$venv/chromium

skip() {
    rm -rf "$folder" "$venv/bin/chromium"
    echo "no chromium ($1): the tests that open the report in a browser will skip"
    exit 0
}

for name in chromium chromium-browser; do
    if command -v $name >/dev/null; then exit 0; fi
done
if [ -x "$venv/bin/chromium" ]; then exit 0; fi
command -v apt-get >/dev/null && command -v dpkg >/dev/null || skip "no apt-get here"

echo "downloading a headless chromium for the tests of the report page; CHROMIUM=no skips both"
mkdir -p "$folder/lists/partial" "$folder/cache/archives/partial"
cd "$folder"
# lists of its own, which need no root, where the machine has none
options="-qq -o Acquire::http::Timeout=20 -o Acquire::Retries=1 -o APT::Sandbox::User=$(id -un)"
lacking() { apt-get $options -s --no-install-recommends install chromium-headless-shell 2>/dev/null; }
if ! lacking >plan; then
    options="$options -o Dir::State::lists=$folder/lists -o Dir::Cache=$folder/cache"
    apt-get $options update >/dev/null 2>&1 || skip "no package lists"
    lacking >plan || skip "no package chromium-headless-shell"
fi
apt-get $options download $(sed -n 's/^Inst \([^ ]*\).*/\1/p' plan) >/dev/null 2>&1 || skip "no download"
for package in *.deb; do dpkg -x "$package" . || skip "$package does not unpack"; done
rm -rf *.deb lists cache plan

libraries=$(echo "$folder"/usr/lib/*-linux-gnu)
cat >"$venv/bin/chromium" <<END
#!/bin/sh
export LD_LIBRARY_PATH="$libraries:$libraries/pulseaudio"
exec "$folder/usr/lib/chromium/chromium-headless-shell" "\$@"
END
chmod +x "$venv/bin/chromium"
"$venv/bin/chromium" --version >/dev/null 2>&1 || skip "it does not start"
