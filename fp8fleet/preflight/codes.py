"""The codes of preflight's findings: severity and meaning; docs/preflight.md lists them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "warning"]


@dataclass(frozen=True)
class Code:
    """What a finding's code stands for; an error stops the host, a warning is shown."""

    severity: Severity
    meaning: str
    chinese: str


def _error(meaning: str, chinese: str) -> Code:
    return Code("error", meaning, chinese)


def _warning(meaning: str, chinese: str) -> Code:
    return Code("warning", meaning, chinese)


CODES: dict[str, Code] = {
    # The probe itself
    "probe-failed": _error(
        "The probe gave no whole answer: the host's shell or a driver hangs.",
        "探测没有得到完整回答：主机的 shell 或驱动挂起。",
    ),
    "probe-incomplete": _warning(
        "A part of the probe ran into its time limit; what it asks for was not judged.",
        "探测的某一部分超时，相应内容未作判断。",
    ),
    "no-root": _error(
        "Commands cannot run as root: no sudo, or it wants a password that is not set.",
        "无法以 root 运行命令：没有 sudo，或 sudo 需要密码但未设置。",
    ),
    # Operating system
    "os-unknown": _error(
        "The distribution is not in the catalogue.", "发行版不在 catalog 中。"
    ),
    "os-mismatch": _error(
        "The host runs another platform than the inventory says (Kylin desktop for server, too).",
        "主机的平台与清单不符（包括把麒麟桌面版当作服务器版）。",
    ),
    "arch-mismatch": _error(
        "The processor architecture differs from the inventory's.", "处理器架构与清单不符。"
    ),
    "glibc-old": _error(
        "The C library is older than the engine's wheel needs.",
        "C 库的版本低于引擎 wheel 的要求。",
    ),
    "glibc-differs": _warning(
        "The C library differs from the catalogue's for this platform.",
        "C 库的版本与 catalog 中该平台的版本不同。",
    ),
    "init-missing": _error(
        "systemd is not the init process: servers are systemd units.",
        "init 进程不是 systemd：服务实例是 systemd 单元。",
    ),
    "tool-missing": _error(
        "A base utility that every role uses is missing.", "缺少各角色都要用的基本工具。"
    ),
    "container": _warning(
        "The host is a container: kernel parameters and modules belong to the machine below.",
        "主机是容器：内核参数和内核模块属于下层机器。",
    ),
    "locale-not-utf8": _warning(
        "The system's locale is not UTF-8; fp8fleet sets its own, other tools may stumble.",
        "系统区域设置不是 UTF-8；fp8fleet 使用自己的设置，其他工具可能出错。",
    ),
    "clock-wrong": _error(
        "The clock is off by more than an hour: certificates and signatures fail.",
        "时钟偏差超过一小时：证书和签名会失效。",
    ),
    "clock-skew": _warning(
        "The clock is off by more than ten seconds.", "时钟偏差超过十秒。"
    ),
    "clock-unsynced": _warning(
        "Nothing keeps the clock in time.", "没有时间同步服务。"
    ),
    "reboot-pending": _warning(
        "An update waits for a reboot.", "有更新等待重启生效。"
    ),
    # Packages
    "packages-broken": _error(
        "The package database is broken or locked: half-installed packages, rpm that hangs.",
        "软件包数据库损坏或被锁：包处于半安装状态，或 rpm 挂起。",
    ),
    "packages-unfinished": _warning(
        "Packages wait for their configuration; the host role finishes that.",
        "有软件包尚未配置完成；host 角色会完成配置。",
    ),
    "packages-busy": _warning(
        "Another package manager is at work; the run waits for it.",
        "另一个包管理程序正在运行；本次运行会等待。",
    ),
    "upgrades-unattended": _warning(
        "Unattended upgrades may replace the driver or kernel under running servers.",
        "无人值守升级可能在服务运行时替换驱动或内核。",
    ),
    # Processor, memory, disk
    "cpu-lacks-amx": _error(
        "A block-FP8 checkpoint on a CPU without AMX.", "在没有 AMX 的 CPU 上使用块 FP8 权重。"
    ),
    "cpu-lacks-avx2": _error(
        "vLLM's CPU build needs AVX2.", "vLLM 的 CPU 版本需要 AVX2。"
    ),
    "memory-short": _warning(
        "The host has less memory than the model has bytes: loading will be slow or fail.",
        "主机内存小于模型大小：加载会很慢或失败。",
    ),
    "disk-short": _error(
        "Too little disk is free for environments and model beside what is there.",
        "磁盘空间不足以在现有内容之外放下环境和模型。",
    ),
    "disk-read-only": _error(
        "A file system that has to be written to is mounted read-only.",
        "需要写入的文件系统以只读方式挂载。",
    ),
    # Accelerators
    "gpu-missing": _error(
        "Fewer accelerators on the PCI bus than the plan uses.", "PCI 总线上的加速卡少于计划所用。"
    ),
    "gpu-other": _error(
        "The accelerators are not those that the inventory names.", "加速卡与清单所写不符。"
    ),
    "gpu-unknown": _warning(
        "An accelerator's PCI id is not in the catalogue.", "加速卡的 PCI id 不在 catalog 中。"
    ),
    "gpu-lost": _error(
        "The driver shows fewer devices than the PCI bus has: one has fallen off.",
        "驱动看到的设备少于 PCI 总线上的设备：有卡掉线。",
    ),
    "gpu-ecc-errors": _error(
        "A device counts uncorrected memory errors, or a memory row waits for repair.",
        "设备有未纠正的显存错误，或有显存行等待修复。",
    ),
    "gpu-ecc-off": _warning(
        "Error correction of a device's memory is off.", "设备显存的纠错功能已关闭。"
    ),
    "gpu-mig": _error(
        "A device is split by MIG: the server would see a slice.",
        "设备被 MIG 切分：服务实例只能看到一部分。",
    ),
    "gpu-busy": _error(
        "Another program holds so much device memory that the server would not start.",
        "其他程序占用显存过多，服务实例无法启动。",
    ),
    "gpu-shared": _warning(
        "Another program uses a device of the plan.", "其他程序正在使用计划中的设备。"
    ),
    "gpu-unhealthy": _error(
        "The vendor's tool reports a device as not healthy.", "厂商工具报告设备不健康。"
    ),
    "gpu-kernel-errors": _warning(
        "The kernel's log has GPU errors (Xid) since the boot.",
        "内核日志中有本次启动以来的 GPU 错误（Xid）。",
    ),
    "persistence-off": _warning(
        "Persistence mode is off: the driver unloads devices that nobody uses.",
        "持久模式关闭：无人使用时驱动会卸载设备。",
    ),
    # Driver
    "driver-missing": _error(
        "The accelerator's driver or its tool is not installed.", "加速卡的驱动或其工具未安装。"
    ),
    "driver-broken": _error(
        "The driver's tool prints an error, such as a driver/library mismatch.",
        "驱动工具报错，例如驱动与库版本不一致。",
    ),
    "driver-hung": _error(
        "The driver's tool does not end: a device or the driver hangs.",
        "驱动工具不返回：设备或驱动挂起。",
    ),
    "driver-module": _error(
        "The running kernel has no NVIDIA module: a kernel upgrade left it behind.",
        "当前内核没有 NVIDIA 模块：内核升级后模块没有跟上。",
    ),
    "driver-next-kernel": _warning(
        "A newer installed kernel has no NVIDIA module: the next reboot loses the GPUs.",
        "已安装的新内核没有 NVIDIA 模块：下次重启后 GPU 不可用。",
    ),
    "driver-old": _error(
        "The driver is older than the engine's CUDA needs.", "驱动版本低于引擎 CUDA 的要求。"
    ),
    "driver-ended": _warning(
        "The driver's branch gets no fixes any more.", "该驱动分支已停止维护。"
    ),
    "driver-unvalidated": _warning(
        "Driver, CUDA and engine are not in the site's own table.",
        "驱动、CUDA 和引擎的组合不在站点自己的表中。",
    ),
    "nouveau-loaded": _error(
        "The kernel's nouveau driver holds the GPUs.", "内核的 nouveau 驱动占用了 GPU。"
    ),
    "fabric-manager-down": _error(
        "The board has NVSwitches and the fabric manager does not run: CUDA does not start.",
        "主板有 NVSwitch，但 fabric manager 未运行：CUDA 无法启动。",
    ),
    "fabric-manager-version": _error(
        "The fabric manager's version is not the driver's.", "fabric manager 的版本与驱动不同。"
    ),
    "cann-missing": _error(
        "Huawei's CANN is not installed, or its version is not the engine's.",
        "未安装华为 CANN，或其版本与引擎要求不符。",
    ),
    "nvlink-missing": _warning(
        "Devices that share a model are not linked directly.", "共同承担模型的设备之间没有直连。"
    ),
    "numa-split": _warning(
        "Devices that share a model belong to several NUMA nodes.",
        "共同承担模型的设备分属多个 NUMA 节点。",
    ),
    # Network and security
    "port-taken": _error(
        "Another program listens on a port of the plan.", "其他程序占用了计划中的端口。"
    ),
    "firewall-closed": _warning(
        "A firewall runs and the proxy's port is not open.", "防火墙已启用，代理端口未开放。"
    ),
    "proxy-differs": _warning(
        "The host is set to an HTTP proxy that the inventory does not name.",
        "主机设置了清单中没有的 HTTP 代理。",
    ),
    "selinux-off": _warning(
        "SELinux is disabled on a distribution that has it.", "发行版带有 SELinux，但已被禁用。"
    ),
    "selinux-permissive": _warning(
        "SELinux only logs.", "SELinux 只记录、不拦截。"
    ),
    "selinux-pending": _warning(
        "SELinux's mode now and its mode after a reboot differ.",
        "SELinux 当前模式与重启后的模式不同。",
    ),
    "kysec-exec": _warning(
        "KySec controls what may be executed: new programs may be denied.",
        "KySec 执行控制已启用：新程序可能被拒绝执行。",
    ),
}
