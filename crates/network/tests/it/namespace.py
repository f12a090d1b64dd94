"""Makes a network namespace whose only way out is a TUN device, and runs commands in it.

Started with `unshare --net --mount` (and `--user` for a user without rights). Stdin is a Unix socket: the
device's descriptor goes out over it, then commands come in, one JSON array per line, and results go out.
With arguments it becomes that program instead, once a byte has come in.
"""
import fcntl, json, os, socket, struct, subprocess, sys

control = socket.socket(fileno=0)


def run(*command):
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL)


try:
    tun = os.open("/dev/net/tun", os.O_RDWR)
except OSError as error:
    control.send(b"no /dev/net/tun: " + str(error).encode())
    sys.exit(0)
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 1, 0x1000
fcntl.ioctl(tun, TUNSETIFF, struct.pack("16sH22x", b"tun0", IFF_TUN | IFF_NO_PI))
run("ip", "link", "set", "lo", "up")
run("ip", "link", "set", "tun0", "mtu", os.environ.get("TUN_MTU", "65535"), "up")
run("ip", "address", "add", "198.18.0.1/32", "dev", "tun0")
run("ip", "route", "add", "default", "dev", "tun0")
try:
    run("ip", "-6", "address", "add", "fd63:6f64:6578::1/128", "dev", "tun0", "nodad")
    run("ip", "-6", "route", "add", "default", "dev", "tun0")
except subprocess.CalledProcessError:
    pass  # No IPv6 on this machine.
resolv = os.environ["RESOLV_CONF"]
with open(resolv, "w") as file:
    file.write("nameserver 192.0.2.53\n")
run("mount", "--bind", resolv, os.path.realpath("/etc/resolv.conf"))
socket.send_fds(control, [b"tun"], [tun])
os.close(tun)
if len(sys.argv) > 1:
    control.recv(1)
    os.execv(sys.argv[1], sys.argv[1:])
lines = control.makefile("rw")
for line in lines:
    done = subprocess.run(
        json.loads(line), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    output = (done.stdout + done.stderr).decode(errors="replace")
    lines.write(json.dumps([done.returncode, output]) + "\n")
    lines.flush()
