#!/bin/sh
# Installs codex from the tarball of `cargo xtask dist`, or removes it.
#
# What it writes stands in a manifest with its digest: an upgrade replaces, and --uninstall removes, what is still as
# it was installed, and nothing else. Each change is in a journal before it is made. If it fails, or was interrupted
# and is started again, the journal is undone.
set -eu
umask 022
LC_ALL=C
export LC_ALL

usage() {
    cat << 'USAGE'
Install codex from a tarball, or remove it.

Usage: install.sh --from FILE [--prefix DIR]
       install.sh --uninstall [--prefix DIR]

  --from FILE    the tarball; SHA256SUMS beside it has to name it with its digest
  --prefix DIR   where to install (default: ~/.local)
  --uninstall    remove what was installed there, as far as it has not been changed since
USAGE
}

say() { printf '%s\n' "$*"; }
warn() { printf 'install.sh: %s\n' "$*" >&2; }
fail() { warn "$*"; exit 1; }

from='' prefix='' uninstall=''
while [ $# -gt 0 ]; do
    case $1 in
        --from | --prefix)
            [ $# -ge 2 ] || { warn "$1 needs a value"; usage >&2; exit 2; }
            case $1 in --from) from=$2 ;; *) prefix=$2 ;; esac
            shift ;;
        --from=*) from=${1#*=} ;;
        --prefix=*) prefix=${1#*=} ;;
        --uninstall) uninstall=yes ;;
        -h | --help) usage; exit 0 ;;
        *) warn "unexpected argument \"$1\""; usage >&2; exit 2 ;;
    esac
    shift
done
if [ -n "$from" ] && [ -n "$uninstall" ]; then warn '--from and --uninstall exclude each other'; exit 2; fi
if [ -z "$from" ] && [ -z "$uninstall" ]; then usage >&2; exit 2; fi

newline='
'
[ -n "$prefix" ] || prefix=${HOME:?is not set; pass --prefix}/.local
case $prefix in *"$newline"*) fail 'the prefix must not contain a line break' ;; esac
case $prefix in /*) ;; *) prefix=$PWD/$prefix ;; esac
case $from in '' | /*) ;; *) from=$PWD/$from ;; esac

own=$prefix/share/codex-exec-server
manifest=$own/manifest
# The files of a change that is under way. There is one at a time.
stage=$prefix/.codex-exec-server.install
journal=$stage/journal

digest() {
    if command -v sha256sum > /dev/null; then sha256sum < "$1"
    elif command -v shasum > /dev/null; then shasum -a 256 < "$1"
    elif command -v openssl > /dev/null; then openssl dgst -sha256 -r < "$1"
    else fail 'cannot compute a digest; install sha256sum, shasum or openssl'
    fi | cut -d ' ' -f 1
}

exists() { [ -e "$1" ] || [ -L "$1" ]; }

# Whether a file or link is as a line of the manifest has it.
unchanged() {
    case $1 in
        file) [ -f "$prefix/$3" ] && [ ! -L "$prefix/$3" ] && [ "$(digest "$prefix/$3")" = "$2" ] ;;
        link) [ -L "$prefix/$3" ] && [ "$(readlink "$prefix/$3")" = "$2" ] ;;
    esac
}

# The line of a manifest for a file or link: its kind, its digest or target, its path.
describe() {
    if [ -L "$1" ]; then say "link $(readlink "$1") $2"; else say "file $(digest "$1") $2"; fi
}

# Whether a path of a manifest stays below the prefix.
is_below() {
    case /$1/ in //* | */../*) return 1 ;; esac
}

# Undoes what the journal says, the last change first.
roll_back() {
    made_prefix=$(cat "$stage/made-prefix" 2> /dev/null) || made_prefix=no
    [ ! -f "$journal" ] || sed -n '1!G;h;$p' "$journal" | while read -r change path; do
        case $change in
            directory) rmdir "$prefix/$path" 2> /dev/null || : ;;
            new) rm -f "$prefix/$path" ;;
            old) ! exists "$stage/old/$path" || mv -f "$stage/old/$path" "$prefix/$path" ;;
        esac
    done
    rm -rf "$stage"
    if [ "$made_prefix" = yes ]; then rmdir "$prefix" 2> /dev/null || :; fi
}

make_directory() {
    if [ "$1" = . ] || [ -d "$prefix/$1" ]; then return; fi
    make_directory "$(dirname "$1")"
    say "directory $1" >> "$journal"
    mkdir "$prefix/$1"
}

# Keeps a file for the case that it has to come back.
back_up() {
    mkdir -p "$(dirname "$stage/old/$1")"
    cp -pP "$prefix/$1" "$stage/old/$1"
    say "old $1" >> "$journal"
}

# Moves a file of the stage to its place, in place of what the manifest in force has there.
put() {
    make_directory "$(dirname "$2")"
    if exists "$prefix/$2"; then back_up "$2"; else say "new $2" >> "$journal"; fi
    mv -f "$1" "$prefix/$2"
}

# Takes the stage for this run.
begin() {
    if [ -d "$stage" ]; then
        # The first file in it. Without it and a journal, the other run has only begun.
        pid=$(cat "$stage/pid" 2> /dev/null) || pid=''
        if [ -z "$pid" ] && [ ! -f "$journal" ]; then
            fail "another install.sh has begun; if none has, remove $stage"
        elif [ -n "$pid" ] && kill -0 "$pid" 2> /dev/null; then
            fail "another install.sh is at work (process $pid); if that is another program, remove $stage/pid"
        fi
        warn 'an earlier run was interrupted; undoing it'
        if [ -e "$stage/done" ]; then rm -rf "$stage"; else roll_back; fi
    fi
    made_prefix=no
    if [ ! -d "$prefix" ]; then mkdir -p "$prefix"; made_prefix=yes; fi
    # Fails if another run is faster.
    mkdir -m 700 "$stage"
    say "$$" > "$stage/pid"
    say "$made_prefix" > "$stage/made-prefix"
    trap 'roll_back; warn "failed; nothing was changed"' EXIT
    trap 'exit 129' HUP
    trap 'exit 130' INT
    trap 'exit 143' TERM
    : > "$journal"
    : > "$stage/before"
    [ ! -f "$manifest" ] || cp "$manifest" "$stage/before"
}

commit() {
    : > "$stage/done"
    trap - EXIT
    rm -rf "$stage"
}

unpack() {
    name=$(basename "$from")
    sums=$(dirname "$from")/SHA256SUMS
    [ -f "$from" ] || fail "$from is not a file"
    [ -f "$sums" ] || fail "$sums is missing: the tarball cannot be checked"
    # A copy, so that what is checked is what is unpacked.
    cp "$from" "$stage/tarball"
    expected=$(while read -r sum file || [ -n "$sum" ]; do [ "${file#\*}" != "$name" ] || say "$sum"; done < "$sums")
    [ -n "$expected" ] || fail "$sums does not name $name"
    [ "$(digest "$stage/tarball")" = "$expected" ] || fail "$name does not match its digest in $sums"
    mkdir "$stage/new"
    gzip -dc "$stage/tarball" > "$stage/tar"
    # Without the directory that the tarball has around everything.
    (cd "$stage/new" && tar -xof ../tar)
    mv "$stage"/new/*/* "$stage/new"
    [ -x "$stage/new/bin/codex" ] || fail "$name has no program"
    "$stage/new/bin/codex" --version > /dev/null || fail "the program in $name does not run on this machine"
}

# Units name the program by its path: here, this one.
rewrite_units() {
    # In a unit, a quoted word has escapes of C, and %% is a percent sign; in sed, \ and & and the delimiter have meaning.
    unit_path=$(say "$prefix/bin/codex" | sed 's/[\\"]/\\&/g; s/%/%%/g; s/[\\&|]/\\&/g')
    for unit in "$stage"/new/lib/systemd/system/* "$stage"/new/share/systemd/user/*; do
        sed "s|^ExecStart=/usr/bin/codex |ExecStart=\"$unit_path\" |" "$unit" > "$stage/unit"
        mv "$stage/unit" "$unit"
    done
}

install_files() {
    (cd "$stage/new" && find . '(' -type f -o -type l ')' | sed 's|^\./||' | sort) > "$stage/paths"
    while read -r path; do
        describe "$stage/new/$path" "$path"
    done < "$stage/paths" > "$stage/manifest"
    # Nothing is replaced but what this installer wrote.
    while read -r path; do
        exists "$prefix/$path" || continue
        entry=$(awk -v path="$path" '$3 == path' "$stage/before")
        [ -n "$entry" ] || fail "$prefix/$path exists, and was not installed by this script"
        entry=${entry% *}
        unchanged "${entry%% *}" "${entry#* }" "$path" \
            || fail "$prefix/$path was changed since it was installed; move it away"
    done < "$stage/paths"
    while read -r path; do
        put "$stage/new/$path" "$path"
    done < "$stage/paths"
    # What only the version before had.
    while read -r kind value path; do
        if [ "$kind" = directory ] || ! is_below "$path"; then continue; fi
        if ! grep -qxF -e "$path" "$stage/paths" && unchanged "$kind" "$value" "$path"; then
            back_up "$path"
            rm -f "$prefix/$path"
        fi
    done < "$stage/before"
    make_directory "${own#"$prefix"/}"
    { sed -n 's/^directory /directory - /p' "$journal"; grep '^directory ' "$stage/before" || :; } >> "$stage/manifest"
    put "$stage/manifest" "${manifest#"$prefix"/}"
}

remove_files() {
    while read -r kind value path; do
        is_below "$path" || fail "$manifest is damaged: it names $path"
        if [ "$kind" = directory ] || ! exists "$prefix/$path"; then continue; fi
        if unchanged "$kind" "$value" "$path"; then
            back_up "$path"
            rm -f "$prefix/$path"
        else
            warn "$prefix/$path was changed since it was installed; it stays"
        fi
    done < "$stage/before"
    back_up "${manifest#"$prefix"/}"
    rm -f "$manifest"
}

# The directories that the installer made, as far as they are empty; the inner ones first.
remove_directories() {
    while read -r kind _ path; do
        [ "$kind" != directory ] || say "$path"
    done | sort -r | while read -r path; do
        rmdir "$prefix/$path" 2> /dev/null || :
    done
}

if [ -n "$uninstall" ]; then
    nothing="nothing is installed in $prefix: there is no $manifest"
    [ -f "$manifest" ] || [ -d "$stage" ] || fail "$nothing"
    begin
    # Undoing an interrupted installation may have removed it.
    [ -f "$manifest" ] || fail "$nothing"
    directories=$(cat "$stage/before")
    remove_files
    commit
    say "$directories" | remove_directories
    say "Removed codex from $prefix."
    exit
fi

begin
unpack
rewrite_units
install_files
commit
say "Installed $("$prefix/bin/codex" --version) in $prefix."
case :$PATH: in
    *":$prefix/bin:"*) ;;
    *) say "Add $prefix/bin to PATH to run it by its name." ;;
esac
