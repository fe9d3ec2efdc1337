#!/usr/bin/env bash
# Writes the lock files beside this script: every package that images and continuous integration install, with its version and
# the hashes of its files. Needs uv and a package index: `just lock`, or `just lock --upgrade` for newer versions.
#
# torch is in none of them: its CPU build lies in another index than PyPI, under a version of its own. constraints.txt has its version.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

# Where the CPU build is found, so that no CUDA package gets into a lock: UV_FIND_LINKS names a folder with its wheel.
torch=(--torch-backend cpu)
[[ -z ${UV_FIND_LINKS:-} ]] || torch=()

compile() {
    local name=$1
    shift
    uv pip compile --quiet --generate-hashes --no-annotate --no-emit-package torch "${torch[@]}" \
        --python-version 3.11 --python-platform linux --custom-compile-command "just lock" \
        --constraints constraints.txt --output-file "deploy/locks/$name.txt" "$@"
}

compile ci pyproject.toml --extra test "$@"
same=(--constraints deploy/locks/ci.txt pyproject.toml)
compile server "${same[@]}" --extra server "$@"
compile tools "${same[@]}" --extra auth "$@"
compile environment "${same[@]}" --extra environment "$@"
compile monitor "${same[@]}" --extra monitor --extra metrics "$@"
compile learner "${same[@]}" --extra environment --extra torch "$@"
compile docs "${same[@]}" --extra docs "$@"
compile build --constraints deploy/locks/ci.txt - "$@" <<<"hatchling"
compile release --constraints deploy/locks/ci.txt - "$@" <<<$'cyclonedx-bom\nhatchling\ntwine'
compile resolve - "$@" <<<"uv==0.13.9"
