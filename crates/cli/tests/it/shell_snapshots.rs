//! `shellSnapshot` of `process/start` inside sandboxes, where the shell's state has to get through.

use serde_json::{Value, json};

use crate::support::{Running, start};

fn params(id: &str, script: &str, home: &std::path::Path, sandbox: &Value, tty: bool) -> Value {
    let mut params = start(id, script);
    params["argv"] = json!(["/bin/bash", "-lc", script, "zero", "one"]);
    params["env"] = json!({"HOME": home, "PATH": "/usr/bin:/bin"});
    params["cwd"] = json!(home);
    params["sandbox"] = sandbox.clone();
    params["tty"] = json!(tty);
    params["shellSnapshot"] =
        json!({"scopeId": "s", "shell": {"name": "bash", "path": "/bin/bash"}});
    params
}

/// A profile that an earlier command wrote: what it exports decides neither what the next sandbox grants, nor what
/// the operator lets a program start with.
#[tokio::test]
async fn a_profile_widens_no_policy() {
    let world = tempfile::tempdir_in("/var/tmp").unwrap();
    let (home, outside) = (world.path().join("home"), world.path().join("outside"));
    for directory in [&home, &outside, &home.join(".git")] {
        std::fs::create_dir(directory).unwrap();
    }
    let operator = world.path().join("operator.toml");
    let text = format!(
        "write = [{home:?}, \"/dev/null\"]\nread = [\"/\"]\nenv = [\"HOME\", \"PATH\", \"TMPDIR\"]\n"
    );
    std::fs::write(&operator, text).unwrap();
    let sandbox = json!({"permissions": "workspace-write", "cwd": home, "workspaceRoots": [home]});
    let script = "touch \"$TARGET/new\" 2>/dev/null; touch new; echo ${TMPDIR-none} ${FROM-none}\n\
                  f; shopt -q login_shell || echo restored; [ -e /dev/fd/3 ] || echo closed\n\
                  env | grep -c BASH_FUNC_f";
    for (with_policy, tmpdir) in
        [(false, None), (false, Some(world.path().join("own"))), (true, None)]
    {
        let server = match with_policy {
            true => Running::start(&["--policy", operator.to_str().unwrap()]),
            false => Running::start(&["--sandbox-assurance", "landlock"]),
        };
        let mut client = server.client().await;
        for (n, target) in [&outside, &home.join(".git"), world.path()].into_iter().enumerate() {
            let profile = format!(
                "export TMPDIR={} FROM=profile; f() {{ echo function; }}; export -f f\n",
                target.display()
            );
            std::fs::write(home.join(".bash_profile"), profile).unwrap();
            let id = format!("p{n}");
            let script = script.replace("$TARGET", target.to_str().unwrap());
            let mut asked = params(&id, &script, &home, &sandbox, false);
            if let Some(tmpdir) = &tmpdir {
                asked["env"]["TMPDIR"] = json!(tmpdir);
            }
            let answer = client.call("process/start", asked).await;
            assert_eq!(answer["result"]["processId"], id, "{answer}");
            let (output, _) = client.closed(&id).await;
            let kept = tmpdir.as_ref().map_or("none".to_owned(), |it| it.display().to_string());
            let from = if with_policy { "none" } else { "profile" };
            // The operator does not let functions be exported.
            let exported = usize::from(!with_policy);
            let expected = format!("{kept} {from}\nfunction\nrestored\nclosed\n{exported}\n");
            assert_eq!(output, expected, "{with_policy}");
            assert!(!target.join("new").exists(), "{}", target.display());
            std::fs::remove_file(home.join("new")).unwrap();
        }
    }
}

#[tokio::test]
async fn sandboxed_shells_restore_their_snapshot() {
    let server = Running::start(&["--sandbox-assurance", "landlock"]);
    let home = tempfile::tempdir_in("/var/tmp").unwrap();
    let profile = "export FROM=profile; f() { echo function; }; alias a='echo alias'\n\
                   shopt -s expand_aliases\n\
                   touch $HOME/written 2>/dev/null && export WROTE=yes\n";
    std::fs::write(home.path().join(".bash_profile"), profile).unwrap();
    let policy = |kind: &str| json!({"permissions": {"type": kind}, "cwd": home.path(), "workspaceRoots": [home.path()]});
    let mut client = server.client().await;
    let script = "f; a; echo $FROM ${WROTE-no} $0 $1; shopt -q login_shell || echo restored\n\
                  [ -e /dev/fd/3 ] || echo closed; env | grep -ci -e codex -e BASH_ENV";
    for (kind, wrote) in [("read-only", "no"), ("workspace-write", "yes")] {
        // The spare takes the place of the second and later sandboxes.
        for (n, tty) in [false, true, false, true].into_iter().enumerate() {
            let id = format!("{kind}{n}");
            let asked = params(&id, script, home.path(), &policy(kind), tty);
            let answer = client.call("process/start", asked).await;
            assert_eq!(answer["result"]["sandboxType"], "linuxSeccomp", "{answer}");
            let (output, _) = client.closed(&id).await;
            let expected =
                format!("function\nalias\nprofile {wrote} zero one\nrestored\nclosed\n0\n");
            assert_eq!(output.replace('\r', ""), expected, "{id}");
        }
    }
}
