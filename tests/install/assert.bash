# What the tests of the installation share.
set -euo pipefail

fail() { printf '%s: %s\n' "${0##*/}" "$*" >&2; exit 1; }

# Everything below a directory: kinds, modes, targets of links and digests.
tree() {
    (cd "$1" && find . -printf '%y %m %p %l\n' | sort && find . -type f -exec sha256sum {} + | sort)
}

assert_same_tree() { diff <(printf '%s\n' "$1") <(tree "$2") || fail "$3"; }

# Whether a command fails and says this.
assert_refused() {
    local said=$1 output
    shift
    ! output=$("$@" 2>&1) || fail "$* did not fail"
    [[ $output == *"$said"* ]] || fail "expected \"$said\" in: $output"
}

# Waits until a file has a line, while this process runs, and prints the line.
first_line() {
    until [ -s "$1" ]; do kill -0 "$2" 2> /dev/null || fail 'the server has ended'; sleep 0.05; done
    head -n 1 "$1"
}
