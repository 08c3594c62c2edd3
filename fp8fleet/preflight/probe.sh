# Reads what a host is and prints it in sections; changes nothing. POSIX sh with POSIX tools.
# arguments: mode=fast|full root=0|1 path=DIR stamp=FILE size=DIR port=NUMBER
# clock=UNIT account=USER, any number of each
# A section is `@NAME`, its lines behind one space, and ` =EXIT CODE` as the last of them.
LC_ALL=C
# of no unit at all systemctl would list every one: PROBE_CLOCKS has one that is nowhere
PATH=$PATH:/usr/sbin:/sbin:/usr/local/sbin:/usr/local/bin:/usr/local/Ascend/driver/tools
PROBE_PATHS=/usr PROBE_STAMPS= PROBE_SIZES= PROBE_PORTS= PROBE_CLOCKS=none PROBE_ACCOUNT= mode=fast root=0
for argument; do
  value=${argument#*=}
  case $argument in
    mode=*) mode=$value ;;
    root=*) root=$value ;;
    path=*) PROBE_PATHS="$PROBE_PATHS $value" ;;
    stamp=*) PROBE_STAMPS="$PROBE_STAMPS $value" ;;
    size=*) PROBE_SIZES="$PROBE_SIZES $value" ;;
    port=*) PROBE_PORTS="$PROBE_PORTS $value" ;;
    clock=*) PROBE_CLOCKS="$PROBE_CLOCKS $value" ;;
    account=*) PROBE_ACCOUNT=$value ;;
  esac
done
export LC_ALL PATH PROBE_PATHS PROBE_STAMPS PROBE_SIZES PROBE_PORTS PROBE_CLOCKS PROBE_ACCOUNT

# a hung tool must not hang the probe; old busybox knows no -k
if timeout -k 2 5 true 2>/dev/null; then bounded() { timeout -k 2 "$@"; }
elif timeout 5 true 2>/dev/null; then bounded() { timeout "$@"; }
else bounded() { shift; "$@"; }
fi

# part NAME SECONDS SCRIPT: only ASCII leaves, so that no locale can garble the answer
part() {
  printf '@%s\n' "$1"
  { bounded "$2" sh -c "$3" 2>&1 </dev/null; printf '\n=%s\n' "$?"; } |
    tr -cd '\011\012\033\040-\176' | sed 's/^/ /'
}

part user 10 'id -u; id -un
  [ "$(id -u)" = 0 ] && exit 0
  command -v sudo >/dev/null || { echo "sudo missing"; exit 0; }
  sudo -n true >/dev/null 2>&1; echo "sudo $?"'
# without the right to look behind it, the caller asks again with sudo
if [ "$root" = 1 ] && [ "$(id -u)" != 0 ]; then echo @end; exit 0; fi

part time 5 'date -u +%s'
part os 5 'cat /etc/os-release 2>/dev/null || cat /usr/lib/os-release'
part product 5 'cat /etc/.productinfo 2>/dev/null; cat /etc/kylin-release 2>/dev/null; exit 0'
part kernel 5 'uname -s; uname -r; uname -m'
part libc 5 'getconf GNU_LIBC_VERSION 2>/dev/null || ldd --version 2>&1 | head -n 1'
part init 10 'cat /proc/1/comm; cat /run/systemd/container 2>/dev/null; [ -e /.dockerenv ] && echo docker; exit 0'
part tools 5 'for t in awk base64 chmod chown cat df flock grep head install mkdir mv rm sed sha256sum stat sync systemctl tail timeout touch tr
  do command -v $t >/dev/null || echo $t; done; exit 0'
part locale 5 'for f in /etc/locale.conf /etc/default/locale /etc/sysconfig/i18n
  do [ -r $f ] && grep -E "^(LANG|LC_ALL)=" $f; done; exit 0'
part clock 15 'timedatectl show -p NTPSynchronized 2>/dev/null ||
    timedatectl status 2>/dev/null | sed -n "s/.*synchronized: */NTPSynchronized=/p"
  set -f; systemctl list-units --plain --no-legend --state=active $PROBE_CLOCKS 2>/dev/null |
    sed -n "s/^\([^ ]*\)\.service .*/service \1/p"; exit 0'
part reboot 5 'for f in /run/reboot-required /var/run/reboot-required
  do [ -e $f ] && { echo $f; break; }; done; exit 0'
part account 10 '[ "$PROBE_ACCOUNT" ] || exit 0
  getent passwd "$PROBE_ACCOUNT" | sed "s/^/user /"; getent group "$PROBE_ACCOUNT" | sed "s/^/group /"'
part earlier 5 '[ -e /run/fp8fleet.work ] && echo yes; exit 0'

part cpu 5 'grep -c "^processor" /proc/cpuinfo
  grep -E "^(model name|Model Name|CPU part)" /proc/cpuinfo | head -n 1
  grep -E "^(flags|Features)" /proc/cpuinfo | head -n 1'
part memory 5 'grep -E "^(MemTotal|MemAvailable|SwapTotal)" /proc/meminfo'
part numa 5 'for n in /sys/devices/system/node/node[0-9]*
  do [ -r $n/cpulist ] && echo "${n##*/node} $(cat $n/cpulist)"; done; exit 0'
part disk 20 'for p in $PROBE_PATHS; do
    q=$p
    while [ ! -d "$q" ]; do q=${q%/*}; q=${q:-/}; done
    a=$(df -P -k "$q" 2>&1)
    l=$(printf "%s\n" "$a" | sed -n "s/.* \([0-9][0-9]*\)  *[0-9-][0-9-]*  *\([0-9][0-9]*\)  *[0-9-][0-9-]*%*  *\(\/.*\)/\1 \2 \3/p")
    [ "$l" ] || { printf "%s\n" "$a" | tail -n 1; continue; }
    m=$(printf "%s\n" "${l#* * }" | sed "s/ /\\\\040/g")
    set -- $l
    o=$(M=$m awk "\$2 == ENVIRON[\"M\"] { o = \$4 } END { print o }" /proc/mounts)
    printf "%s\n" "$p $2 $1 $m ${o:--}"
  done; exit 0'
part stamps 5 'for p in $PROBE_STAMPS; do [ -e "$p" ] && echo "$p"; done; exit 0'
part sizes 30 'for p in $PROBE_SIZES; do [ -d "$p" ] && du -sk "$p" 2>/dev/null; done; exit 0'

part cmake 10 'cmake --version 2>/dev/null | head -n 1'

# hosts with rpm may have dpkg as a tool, with an empty database
part packages 30 'if command -v dpkg-query >/dev/null && { [ -s /var/lib/dpkg/status ] || ! command -v rpm >/dev/null; }; then
    echo "family apt"
    for f in /var/lib/dpkg/updates/[0-9]*; do [ -e "$f" ] && { echo "journal dpkg"; break; }; done
    l=$(dpkg-query -W -f "\${db:Status-Eflag} \${db:Status-Status} \${Package}\n" 2>&1) || { printf "%s\n" "$l"; exit 2; }
    l=$(printf "%s\n" "$l" | grep -E "^(ok|reinstreq) ") || { echo "its database names no package"; exit 2; }
    printf "%s\n" "$l" | grep -v -E "^ok (installed|config-files|not-installed) "
  elif command -v rpm >/dev/null; then
    echo "family dnf"
    l=$(rpm -q rpm 2>&1) || { printf "%s\n" "$l"; exit 1; }
  fi; exit 0'
part managers 10 'for d in /proc/[0-9]*; do
    read -r c 2>/dev/null <$d/comm || continue
    case $c in apt|apt-get|aptitude|dpkg|dnf|dnf-automatic|yum|apt.systemd.dai) echo "$c ${d#/proc/}" ;; esac
  done 2>/dev/null; exit 0'
part upgrades 20 'apt-config dump APT::Periodic 2>/dev/null | grep -E "Unattended-Upgrade|Enable"
  for u in unattended-upgrades.service apt-daily-upgrade.timer dnf-automatic.timer dnf-automatic-install.timer
  do s=$(systemctl is-enabled $u 2>/dev/null); [ "$s" = enabled ] && echo "enabled $u"; done
  apt-mark showhold 2>/dev/null | sed "s/^/held /"
  grep -s -h -i "^exclude" /etc/dnf/dnf.conf /etc/yum.conf
  cat /etc/dnf/plugins/versionlock.list /etc/yum/pluginconf.d/versionlock.list 2>/dev/null | sed "s/^/held /"
  dpkg-query -W -f "\${db:Status-Status} \${Package} \${Version}\n" "nvidia-driver*" "nvidia-kernel*" "libnvidia-compute*" "cuda-drivers*" "nvidia-fabricmanager*" 2>/dev/null |
    sed -n "s/^installed /package /p"
  command -v dpkg >/dev/null || rpm -qa "nvidia-driver*" "kmod-nvidia*" "cuda-drivers*" "nvidia-fabric*" 2>/dev/null | sed "s/^/package /"
  exit 0'

part pci 20 'for d in /sys/bus/pci/devices/*; do
    [ -r $d/class ] || continue
    read -r c <$d/class
    case $c in 0x03*|0x12*|0x0680*) ;; *) continue ;; esac
    read -r v <$d/vendor; read -r i <$d/device
    case $c$v in 0x0680*0x10de) ;; 0x0680*) continue ;; esac
    n=-1; [ -r $d/numa_node ] && read -r n <$d/numa_node
    l=$(ls -ld $d/driver 2>/dev/null)
    echo "${d##*/} $v $i $c $n ${l##*/}"
  done; exit 0'
part modules 20 'awk "/^(nvidia|nouveau|amdgpu|drv_|davinci)/ { print \"loaded\", \$1 }" /proc/modules 2>/dev/null
  sed -n "1s/^/version /p" /proc/driver/nvidia/version 2>/dev/null
  for k in /lib/modules/*; do
    [ -e $k/modules.dep ] || continue
    f=$(find $k -name "nvidia.ko*" 2>/dev/null | head -n 1)
    echo "kernel ${k##*/} ${f:+nvidia}"
  done; exit 0'
part smi 40 'command -v nvidia-smi >/dev/null || exit 127
  q=index,uuid,name,pci.bus_id,memory.total,memory.used,driver_version,ecc.mode.current,ecc.errors.uncorrected.volatile.total,mig.mode.current,persistence_mode
  a=$(nvidia-smi --query-gpu=$q,compute_cap --format=csv 2>&1); r=$?
  case $a in *"not a valid field"*) a=$(nvidia-smi --query-gpu=$q --format=csv 2>&1); r=$? ;; esac
  printf "%s\n" "$a"; exit $r'
part cuda 30 'command -v nvidia-smi >/dev/null || exit 127
  nvidia-smi | sed -n "s/.*CUDA Version: *\([0-9.]*\).*/\1/p"'
part holders 30 'command -v nvidia-smi >/dev/null || exit 127
  nvidia-smi --query-compute-apps=gpu_uuid,pid,used_memory,process_name --format=csv,noheader,nounits |
    while IFS= read -r l; do
      p=${l#*, }; p=${p%%,*}
      echo "$l | $(sed -n -e "s/^0:://p" -e "s/^1:name=systemd://p" /proc/$p/cgroup 2>/dev/null | head -n 1)"
    done'
part topology 40 'command -v nvidia-smi >/dev/null || exit 127; nvidia-smi topo -m'
part fabric 15 'systemctl show nvidia-fabricmanager.service -p LoadState,ActiveState 2>/dev/null
  command -v nv-fabricmanager >/dev/null && nv-fabricmanager --version
  exit 0'
part npu 40 'command -v npu-smi >/dev/null || exit 127; npu-smi info'
part nputopo 40 'command -v npu-smi >/dev/null || exit 127; npu-smi info -t topo'
part ascend 10 'for f in /usr/local/Ascend/driver/version.info; do [ -r $f ] && sed "s/^/driver /" $f; done
  for f in /usr/local/Ascend/*/latest/*-linux/ascend_toolkit_install.info /usr/local/Ascend/*/latest/ascend_toolkit_install.info /usr/local/Ascend/cann/*-linux/ascend_toolkit_install.info
  do [ -r $f ] && sed -n "s/^version=/cann /p" $f; done; exit 0'

part ports 30 'wanted=
  for p in $PROBE_PORTS; do wanted="$wanted $(printf %04X "$p"):$p"; done
  l=$(cat /proc/net/tcp /proc/net/tcp6 2>/dev/null |
    awk -v wanted="$wanted" "
      BEGIN { n = split(wanted, w, \" \"); for (i = 1; i <= n; i++) { split(w[i], x, \":\"); port[x[1]] = x[2] } }
      \$4 == \"0A\" { k = split(\$2, a, \":\")
        if (a[k] in port) print port[a[k]], \$10
        else if (a[1] !~ /7F$/ && a[1] != \"00000000000000000000000001000000\") print \"x\" a[k], \$10 }" | sort -u)
  h=$(ls -l /proc/[0-9]*/fd 2>/dev/null | awk "
    /^\/proc\// { split(\$1, x, \"/\") }
    match(\$0, /socket:.[0-9]+/) { print substr(\$0, RSTART + 8, RLENGTH - 8), x[3] }")
  echo "$l" | while read -r p i; do
      [ "$i" ] || continue
      case $p in x*) p=$((0x${p#x})) ;; esac
      q=$(echo "$h" | sed -n "s/^$i //p" | head -n 1)
      g=$(sed -n -e "s/^0:://p" -e "s/^1:name=systemd://p" /proc/${q:-none}/cgroup 2>/dev/null | head -n 1)
      echo "$p ${q:--} ${g:--} $(cat /proc/${q:-none}/comm 2>/dev/null || echo -)"
    done; exit 0'
part firewall 20 'if command -v firewall-cmd >/dev/null; then
    s=$(firewall-cmd --state 2>&1 | head -n 1)
    echo "firewalld $s"
    f=firewall-cmd; [ "$s" = running ] || f=firewall-offline-cmd
    $f --list-all-zones 2>/dev/null | sed "s/^/zone /"
    sed -n "s/^DefaultZone=/default /p" /etc/firewalld/firewalld.conf 2>/dev/null
    sed -n "s/^ZONE=/bound /p;s/^zone=/bound /p" /etc/sysconfig/network-scripts/ifcfg-* /etc/NetworkManager/system-connections/* 2>/dev/null
    grep -s "<port " /usr/lib/firewalld/services/*.xml /etc/firewalld/services/*.xml | sed "s/^/service /"
  fi
  if command -v ufw >/dev/null; then
    ufw status 2>/dev/null | sed -n "s/^Status: */ufw /p"
    sed -n "s/^DEFAULT_INPUT_POLICY=/policy /p;s/^IPV6=/ipv6 /p" /etc/default/ufw 2>/dev/null
    grep -h -s "^### tuple" /etc/ufw/user.rules /etc/ufw/user6.rules
  fi
  ss -Htnlp 2>/dev/null | sed "s/^/listen /"
  ss -Htnp state established 2>/dev/null | grep sshd | sed "s/^/established /"
  exit 0'
part proxy 5 '{ env | grep -i -E "^(https?|all|no)_proxy="
    grep -s -h -i -E "^(export )?(https?|all|no)_proxy=" /etc/environment /etc/profile.d/*.sh
    grep -s -h -i -E "^proxy *=" /etc/dnf/dnf.conf /etc/yum.conf
    apt-config dump Acquire::http::Proxy Acquire::https::Proxy 2>/dev/null
# a login may have a slash or an @ in it: all up to the last @ goes
  } | sed "s#^\([A-Za-z_: ]*[Pp][Rr][Oo][Xx][Yy][A-Za-z0-9:._-]*[= \"$(printf "\047")]*\([A-Za-z0-9+.-]*://\)\{0,1\}\).*@#\1...@#" | sort -u; exit 0'
part selinux 5 '[ -r /sys/fs/selinux/enforce ] && echo "enforce $(cat /sys/fs/selinux/enforce)"
  [ -r /etc/selinux/config ] && sed -n "s/^SELINUX=/config /p;s/^SELINUXTYPE=/policy /p" /etc/selinux/config
  tr " " "\n" </proc/cmdline | grep -E "^(selinux|enforcing)=[01]" | sed "s/^/kernel /"
  exit 0'
part kysec 15 'command -v getstatus >/dev/null || exit 127; getstatus'

if [ "$mode" = full ]; then
  part xid 15 'dmesg 2>/dev/null | grep "NVRM: Xid" | tail -n 10; exit 0'
  part rows 40 'command -v nvidia-smi >/dev/null || exit 127
    nvidia-smi --query-remapped-rows=gpu_bus_id,remapped_rows.pending,remapped_rows.failure --format=csv,noheader'
  part installed 60 'du -sk /opt/fp8fleet /var/lib/fp8fleet /var/cache/fp8fleet 2>/dev/null; exit 0'
fi
echo @end
