# Completion of the scripts' command lines in bash and zsh: source <(python scripts/train_qwenimage.py --completion)
[ -z "$ZSH_VERSION" ] || { autoload -Uz +X compinit bashcompinit && compinit && bashcompinit; }
_flow_grpo() {
    local line="${COMP_LINE:0:$COMP_POINT}" word script="" python=python IFS=$' \t\n'
    local -a words=($line)
    case "$line" in *[[:space:]]) words+=("");; esac
    case "${words[0]##*/}" in python*) python="${words[0]}";; esac
    for word in "${words[@]}"; do
        case "$word" in *.py) script="$word"; break;; esac
    done
    [ -n "$script" ] && grep -qs "command_line.parse(" "$script" || return 0  # no other script is started
    IFS=$'\n'
    COMPREPLY=($("$python" "$script" --complete "${words[@]}" 2> /dev/null))
    [ -n "$ZSH_VERSION" ] && return 0
    word="${words[${#words[@]} - 1]}"
    COMPREPLY=("${COMPREPLY[@]#"${word%"${word##*[:=]}"}"}")  # bash takes what follows = or : for a word
}
complete -o default -o nospace -F _flow_grpo python python3 torchrun
