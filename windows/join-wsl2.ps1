<#
.SYNOPSIS
  Sets an Anabranch peer up in WSL2 and says which port to open where.
.DESCRIPTION
  Checks WSL2 and the GPU driver, installs Anabranch inside the distribution, and either switches
  WSL2 to mirrored networking (Windows 11 22H2 or newer) or forwards the port to it.
  It asks before it changes anything outside the distribution. It was checked by reading and by a
  parser only; it has not been run on Windows yet.
.EXAMPLE
  .\join-wsl2.ps1 -Model org/name -InitialPeers /ip4/.../tcp/.../p2p/... -Repository https://...
#>
[CmdletBinding()]
param(
    [Parameter(Mandatory = $true)][string]$Model,
    [Parameter(Mandatory = $true)][string]$InitialPeers,
    [Parameter(Mandatory = $true)][string]$Repository,
    [ValidateRange(1024, 65535)][int]$Port = 31337,
    [string]$Distribution = "Ubuntu"
)
Set-StrictMode -Version Latest
$ErrorActionPreference = "Stop"

# What goes into a shell inside WSL2 must be plain: nothing that a shell would act on.
foreach ($value in @($Model, $InitialPeers, $Repository, $Distribution)) {
    if ($value -notmatch '^[A-Za-z0-9._:/@-]+$') { throw "'$value' has characters that are not allowed here" }
}

function Confirm-Step([string]$Question) {
    return (Read-Host "$Question [y/N]") -eq "y"
}

if (-not (Get-Command wsl.exe -ErrorAction SilentlyContinue)) {
    throw "WSL is not installed. Run 'wsl --install -d $Distribution' as administrator, restart, and run this again."
}
wsl.exe -d $Distribution -- true
if ($LASTEXITCODE -ne 0) {
    throw "WSL has no distribution '$Distribution'. Run 'wsl --install -d $Distribution' and start it once."
}
wsl.exe -d $Distribution -- nvidia-smi -L
if ($LASTEXITCODE -ne 0) {
    Write-Warning "No NVIDIA GPU is visible in WSL2: install the newest Windows driver (none inside Linux). The CPU is lent until then."
}

# `command -v a b` succeeds in bash if either is there, so each is asked for by itself.
wsl.exe -d $Distribution -- bash -c "{ command -v git && command -v make && command -v gcc && python3 -c 'import ensurepip'; } > /dev/null 2>&1 || { sudo apt-get update && sudo apt-get install -y git make gcc libc6-dev python3 python3-venv python3-dev; }"
if ($LASTEXITCODE -ne 0) {
    throw "Git, make, gcc and Python 3.11 or newer with venv are needed inside $Distribution, and apt-get could not install them; what it says stands above."
}
wsl.exe -d $Distribution -- bash -c "test -d ~/anabranch || git clone $Repository ~/anabranch"
if ($LASTEXITCODE -ne 0) { throw "$Repository could not be cloned inside $Distribution; what git says stands above." }
wsl.exe -d $Distribution -- bash -c "cd ~/anabranch && make .venv/.ready"
if ($LASTEXITCODE -ne 0) { throw "The installation inside $Distribution failed; what it says stands above." }

$build = [Environment]::OSVersion.Version.Build
$config = Join-Path $env:USERPROFILE ".wslconfig"
$mirrored = (Test-Path $config) -and ((Get-Content $config -Raw) -match "networkingMode\s*=\s*mirrored")
if (-not $mirrored -and $build -ge 22621) {
    Write-Host "Mirrored networking gives WSL2 the addresses of Windows. Put this into ${config}:"
    Write-Host "  [wsl2]`n  networkingMode=mirrored"
    Write-Host "then 'wsl --shutdown' and run this again. Until then the port is forwarded."
}
if (-not $mirrored) {
    $address = ((wsl.exe -d $Distribution -- hostname -I) -split " ")[0]
    Write-Host "Port forward, as administrator; WSL2's address changes with each restart of Windows:"
    Write-Host "  netsh interface portproxy add v4tov4 listenport=$Port listenaddress=0.0.0.0 connectport=$Port connectaddress=$address"
}
$rule = "Anabranch TCP $Port"
if (Confirm-Step "Add the Windows firewall rule '$rule' (needs administrator)?") {
    New-NetFirewallRule -DisplayName $rule -Direction Inbound -Action Allow -Protocol TCP -LocalPort $Port | Out-Null
}
Write-Host "On your router, forward TCP port $Port to this computer. Then others can reach this peer."

wsl.exe -d $Distribution -- bash -c "cd ~/anabranch && exec .venv/bin/python -m node.join --model $Model --port $Port --initial-peers $InitialPeers"
exit $LASTEXITCODE
