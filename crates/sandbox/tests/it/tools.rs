//! Ordinary programs inside the sandbox: compilers, interpreters and related tools work as they do
//! outside. A system call table that breaks them is a bug.
//!
//! Not every machine has them, so these tests run only on request: `cargo test -p codex-linux-sandbox
//! -- --ignored tools`.

use std::io::{Read, Write};
use std::net::TcpListener;
use std::path::Path;

use codex_exec_server_protocol::{NetworkPolicy, PermissionProfile};

use super::support::*;

/// Runs a script in a directory of the workspace, as every user; it must succeed and print `expected`
/// last.
fn works(script: &str, expected: &str) {
    for user in users() {
        works_for(user, PermissionProfile::workspace_write(), script, expected);
    }
}

fn works_for(user: User, permissions: PermissionProfile, script: &str, expected: &str) {
    let world = World::new(user);
    let setup = "set -eu; mkdir -p project home; export HOME=\"$PWD/home\"; cd project\n";
    let done = world.run(permissions, ["bash", "-c", &format!("{setup}{script}")]);
    assert_eq!(done.ok().out.lines().last().unwrap_or_default(), expected, "{user:?}: {done:?}");
}

#[test]
#[ignore = "needs the tools that .ci/run installs"]
fn c_is_compiled_linked_and_run() {
    works(
        r#"
cat > hello.c <<'C'
#include <pthread.h>
#include <stdio.h>
static void *work(void *n) { *(int *)n *= 2; return n; }
int main(void) {
    pthread_t threads[8]; int n[8], sum = 0;
    for (int i = 0; i < 8; i++) { n[i] = i; pthread_create(&threads[i], 0, work, &n[i]); }
    for (int i = 0; i < 8; i++) { pthread_join(threads[i], 0); sum += n[i]; }
    printf("sum %d\n", sum);
}
C
printf 'hello: hello.o\n\tgcc -pthread -o $@ $<\nhello.o: hello.c\n\tgcc -c -O2 -g -o $@ $<\n' > Makefile
make -j2 >&2
ar rcs libhello.a hello.o
gcc -pthread -static -o static hello.c && ./static >&2
ld -r -o joined.o hello.o
strip hello
./hello"#,
        "sum 56",
    );
}

#[test]
#[ignore = "needs the tools that .ci/run installs"]
fn git_keeps_a_history() {
    works(
        r#"
git init --quiet .
git config user.name Somebody; git config user.email somebody@example.com
for n in 1 2 3; do echo $n >> file; git add file; git commit --quiet -m "commit $n"; done
git checkout --quiet -b branch HEAD~1; echo other > other; git add .; git commit --quiet -m other
git rebase --quiet -; git gc --quiet; git fsck >&2; git clone --quiet --no-local . ../clone
git -C ../clone log --format=%s | head -1"#,
        "other",
    );
}

#[test]
#[ignore = "needs the tools that .ci/run installs"]
fn node_has_workers_and_children() {
    works(
        r#"
cat > main.js <<'JS'
const { Worker, isMainThread, parentPort } = require('worker_threads');
const { execFileSync, spawn } = require('child_process');
const fs = require('fs');
if (!isMainThread) { parentPort.postMessage(20); return; }
fs.watch('.').close();
new Worker(__filename).on('message', async (n) => {
  const m = +execFileSync(process.execPath, ['-p', '20 + 2']);
  const shell = spawn('sh', ['-c', 'read x; exit $x']);
  const exited = new Promise((resolve) => shell.on('exit', resolve));
  shell.stdin.end('0\n');
  await fs.promises.writeFile('file', 'x');
  await fs.promises.copyFile('file', 'copy');
  console.log(`answer ${n + m + (await exited)}`);
});
JS
npm init --yes >&2
node main.js"#,
        "answer 42",
    );
}

#[test]
#[ignore = "needs the tools that .ci/run installs"]
fn python_has_processes_databases_and_environments() {
    works(
        r#"
cat > main.py <<'PY'
import asyncio, multiprocessing, os, shutil, signal, sqlite3, subprocess, sys, tempfile, threading
def square(n): return n * n
async def child():
    process = await asyncio.create_subprocess_exec("cat", stdin=-1, stdout=-1)
    return (await process.communicate(b"x"))[0]
if __name__ == "__main__":
    with multiprocessing.Pool(3) as pool: assert sum(pool.map(square, range(10))) == 285
    context = multiprocessing.get_context("spawn")
    with context.Pool(2) as pool: assert pool.map(square, [3]) == [9]
    assert subprocess.run(["echo", "hi"], capture_output=True, start_new_session=True).stdout == b"hi\n"
    assert asyncio.run(child()) == b"x"
    thread = threading.Thread(target=print, args=("thread",), kwargs={"file": sys.stderr})
    thread.start(); thread.join()
    with sqlite3.connect("data.db") as db:
        db.execute("pragma journal_mode=wal")
        db.execute("create table t (n)"); db.executemany("insert into t values (?)", [(1,), (2,)])
        assert db.execute("select sum(n) from t").fetchone() == (3,)
    with tempfile.NamedTemporaryFile() as file: shutil.copy2(file.name, "copied")
    os.nice(1); os.sched_setaffinity(0, os.sched_getaffinity(0))
    if os.fork() == 0: os._exit(7)
    print("status", os.waitstatus_to_exitcode(os.wait()[1]))
PY
python3 -m venv --without-pip venv
venv/bin/python main.py"#,
        "status 7",
    );
}

#[test]
#[ignore = "needs the tools that .ci/run installs"]
fn perl_forks_and_edits() {
    works(
        r#"
echo 'one two' > file
perl -i -pe 's/one/three/' file
perl -e 'pipe(R, W); if (!fork) { print W `cat file`; exit } close W; wait; print <R>'"#,
        "three two",
    );
}

#[test]
#[ignore = "needs the tools that .ci/run installs"]
fn java_is_compiled_and_run() {
    works(
        r#"
cat > Main.java <<'JAVA'
import java.nio.file.*;
import java.util.stream.*;
public class Main {
    public static void main(String[] args) throws Exception {
        int sum = IntStream.range(0, 1000).parallel().map(n -> n % 7).sum();
        Files.writeString(Path.of("file"), "" + sum);
        Process process = new ProcessBuilder("cat", "file").start();
        System.out.println("sum " + new String(process.getInputStream().readAllBytes()));
        System.exit(process.waitFor());
    }
}
JAVA
javac Main.java
jar cf main.jar Main.class
java -cp main.jar Main"#,
        "sum 2997",
    );
}

#[test]
#[ignore = "needs the tools that .ci/run installs"]
fn go_is_compiled_and_run() {
    works(
        r#"
# The workspace has an empty .git in the sandbox, from which no version can be told.
export GOCACHE="$HOME/cache" GOPATH="$HOME/go" GOFLAGS='-mod=mod -buildvcs=false' CGO_ENABLED=0
cat > main.go <<'GO'
package main

import ("fmt"; "os"; "os/exec"; "sync"; "time")

func main() {
	var group sync.WaitGroup
	sums := make(chan int, 100)
	for i := 0; i < 100; i++ {
		group.Add(1)
		go func(i int) { defer group.Done(); time.Sleep(time.Millisecond); sums <- i }(i)
	}
	group.Wait(); close(sums)
	sum := 0
	for n := range sums { sum += n }
	out, err := exec.Command("sh", "-c", "echo child").Output()
	if err != nil { panic(err) }
	if err := os.WriteFile("file", out, 0o600); err != nil { panic(err) }
	fmt.Println("sum", sum)
}
GO
go mod init example >&2
go vet . >&2
go build -o main .
./main"#,
        "sum 4950",
    );
}

/// The toolchain is in the home directory of the user who runs the tests, which others may not enter.
#[test]
#[ignore = "needs the tools that .ci/run installs"]
fn rust_is_compiled_and_run() {
    let cargo = std::env::var("CARGO").unwrap();
    let tools = Path::new(&cargo).parent().unwrap().to_str().unwrap();
    let script = format!(
        r#"
export PATH="{tools}:$PATH" CARGO_HOME="$HOME/cargo"
cargo init --quiet --vcs none --name example .
cat > src/main.rs <<'RS'
fn main() {{
    let threads: Vec<_> = (0..8).map(|n| std::thread::spawn(move || n * 2)).collect();
    println!("sum {{}}", threads.into_iter().map(|t| t.join().unwrap()).sum::<i32>());
}}
#[test]
fn it_works() {{}}
RS
cargo build --quiet --offline
cargo test --quiet --offline >&2
target/debug/example"#
    );
    works_for(User::Own, PermissionProfile::workspace_write(), &script, "sum 56");
}

#[test]
#[ignore = "needs the tools that .ci/run installs"]
fn archives_are_packed_and_unpacked() {
    works(
        r#"
mkdir -p in/deep; seq 1000 > in/numbers; ln -s ../numbers in/deep/link; chmod 750 in/deep
for kind in z J j; do
    tar c${kind}f archive in; rm -rf out; mkdir out; tar xf archive -C out; diff -r in out/in
done
gzip -k in/numbers; xz -k -T2 in/numbers; gzip -t in/numbers.gz; xz -t in/numbers.xz
cp -a in copy; diff -r in copy; install -m 755 in/numbers installed; stat -c %a installed"#,
        "755",
    );
}

#[test]
#[ignore = "needs the tools that .ci/run installs"]
fn shells_and_their_tools_work() {
    works(
        r#"
set -m
sleep 600 & kill -STOP %1; kill -CONT %1; kill %1; wait %1 || test $? = 143
set +m
seq 100 | sort -rn --parallel=2 | sed -n 1p | grep -q 100
echo one > file; sed -i s/one/two/ file; touch -d 2020-01-01 file; truncate -s 1M sparse
find . -type f -print0 | xargs -0 -P 4 -n 1 sha256sum > sums
mkfifo pipe; cat file > pipe & cat pipe; wait
dd if=/dev/zero of=zeros bs=64k count=4 conv=fsync status=none
exec 9> lock; flock 9; timeout 5 true; nice -n 1 true; ionice -c 3 true; taskset -p $$ >&2
setarch -R true; stdbuf -oL echo x >&2; script -qc 'tty' /dev/null >&2; prlimit --nofile >&2
diff <(echo a) <(echo a); awk 'BEGIN { "date" | getline; print "done" }'"#,
        "done",
    );
}

#[test]
#[ignore = "needs the tools that .ci/run installs"]
fn curl_reaches_the_network_where_it_is_enabled() {
    let PermissionProfile::Managed { file_system, .. } = PermissionProfile::workspace_write()
    else {
        panic!("workspace-write is managed");
    };
    let enabled = PermissionProfile::Managed { file_system, network: NetworkPolicy::Enabled };
    for user in users() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}/", listener.local_addr().unwrap());
        let server = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut request = [0; 4096];
            let _ = stream.read(&mut request).unwrap();
            let answer =
                b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\nConnection: close\r\n\r\nhello\n";
            stream.write_all(answer).unwrap();
        });
        let script = format!("curl --silent --show-error {url}; getent hosts localhost >&2");
        works_for(user, enabled.clone(), &script, "hello");
        server.join().unwrap();
    }
}
